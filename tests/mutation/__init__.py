"""Mutations that the tests must turn red."""
