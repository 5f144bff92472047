"""The ranks of a run and what lies between them: process group, rendezvous, votes, signals, and who failed first."""
