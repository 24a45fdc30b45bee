"""Switching filters compiled for the CPU and the GPU; ../../filters/gaussian/switching.py is their torch path."""
