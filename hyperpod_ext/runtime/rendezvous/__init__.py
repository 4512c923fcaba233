"""How processes of one job find each other, agree on who is in, and open and close their process groups."""
