"""What runs inside bubblewrap, on the interpreter of the boxes (>= 3.9): the standard library only, and nothing of
Sparring but these modules, which the fork server gets as text."""
