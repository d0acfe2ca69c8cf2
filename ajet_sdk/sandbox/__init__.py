"""Running a program that a model wrote, inside a fence and with limits."""
