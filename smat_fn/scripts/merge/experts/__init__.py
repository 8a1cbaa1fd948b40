"""The base and the experts of a merge: as they are given, read and checked, and the suite that scores them."""
