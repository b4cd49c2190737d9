"""Query by example: every item of a database can be the query."""
