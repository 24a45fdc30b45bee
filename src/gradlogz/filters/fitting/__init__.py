"""Parameter estimation for switching systems: EM and gradient ascent."""
