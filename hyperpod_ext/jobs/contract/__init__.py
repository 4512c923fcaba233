"""Types and functions that every target uses: capabilities, job handles, job statuses and rendered files."""
