"""Work around mergers: coefficients by dev data or depth, norms of task vectors, adapters, mixtures of experts."""
