"""Parameters of switching systems from series: EM and gradient ascent."""
