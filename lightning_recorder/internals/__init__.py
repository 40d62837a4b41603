"""Private names and behaviour of torch, each in one file."""
