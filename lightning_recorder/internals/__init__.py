"""Private names and behavior of torch, each in one file."""
