"""What a run will need, before anything starts: disk, memory and time by stage. Arithmetic on numbers that are known."""
