"""One job as its user writes it. The container reads only `runtime`, a small part of it."""
