"""Single changes to the package, one at a time: which of them no test notices."""
