"""Small kernels in plain C, compiled where there is a compiler and the CPU has what they need; each has a twin."""
