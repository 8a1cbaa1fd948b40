"""Search of coefficients, options and snapshots, by dev scores in memory or by the score of a command."""
