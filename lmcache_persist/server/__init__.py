"""The server: one ROUTER loop, and the threads that keep slow work off it."""
