"""Renderers: functions from a graph to text."""
