"""The paper as a program: every statement that can be computed, checked."""
