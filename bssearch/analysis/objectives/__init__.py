"""The objectives of a study, one file each; `base` holds their interface, `seconds` the seconds they are made of."""
