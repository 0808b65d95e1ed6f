"""Room `io`: trees on disk, and the names that their leaves have there."""
