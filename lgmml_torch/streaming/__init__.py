"""Reading ranking data list by list, from files that need not fit into memory."""
