"""The rule table: what each primitive does to kinds. Shapes propose, rules dispose."""
