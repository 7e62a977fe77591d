"""What decides a row of the study: a change of a file of this folder makes its rows anew."""
