"""A small trained checkpoint with the exact architecture and on-disk format of the served model."""
