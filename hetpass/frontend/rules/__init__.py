"""The rule table: what each primitive does to the kinds of values. Shapes propose, rules dispose."""
