"""Views: functions from a graph to a smaller or different graph."""
