"""What processes of a node ask their memory server, and what memory servers ask each other: declared once."""
