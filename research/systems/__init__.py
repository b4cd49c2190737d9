"""The systems L-GMML is compared with, behind one small interface."""
