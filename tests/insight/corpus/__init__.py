"""Small trainings of many kinds, healthy and with a planted fault, that measure the precision of the findings."""
