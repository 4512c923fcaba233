"""Token stores: their files, who writes and reads them, and what else can be read like one."""
