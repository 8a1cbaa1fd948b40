"""Where theta_0 and theta~ live while a method trains: on the device, in pinned host memory, or rebuilt."""
