"""Samples on disk: packed where that is asked for, written as Arrow files, kept and checked."""
