"""A user's training command as a trial: started, watched, measured and ended. No Ray, no torch, no CUDA."""
