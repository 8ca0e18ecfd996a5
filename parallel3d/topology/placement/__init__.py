"""Which rank goes on which GPU: searched, or as the user says."""
