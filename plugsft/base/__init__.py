"""The ground floor: errors, console, files and processes.

What a run writes is whole or absent: a folder is filled under a temporary name, synced, listed in
a manifest of sizes and checksums, and then renamed (atomic.py). plugsft replaces and removes only
what such a manifest lists. Where several processes need one folder, a claim lets the others wait
(build_once.py); it is a hint, and not a lock: the guarantee is that each builds in a folder of its
own, and that a rename has one winner. Locks of the system and filelock's leases were tried. The
first may not work between machines, a process that sleeps keeps them, and so do forked workers of
a process that was killed; on NFS the second never take over from a dead holder.
"""
