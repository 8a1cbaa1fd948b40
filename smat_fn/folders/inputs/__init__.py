"""Reading: folders, stacks, adapters, towers, hub names as leaves of base's names; the files beside their weights."""
