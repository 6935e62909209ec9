"""Banks: many adapters of the same modules in one folder, read by rows, grown and checked."""
