"""Tests of loops without a Trainer of Lightning."""
