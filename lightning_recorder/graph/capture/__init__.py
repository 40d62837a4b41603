"""Capture of the execution graph from a running program."""
