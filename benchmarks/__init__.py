"""Benchmarks: print figures with machine and seed, judge nothing."""
