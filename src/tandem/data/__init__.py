"""From a global step to a batch on the device."""
