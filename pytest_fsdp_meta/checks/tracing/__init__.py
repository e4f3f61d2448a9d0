"""Where a step starts to depart from the reference: modules traced call by call."""
