"""One address for several servers: choice by expected seconds, relay, roll-out.

In: requests and residency reports. Out: relayed answers. Must not import: torch, server.
"""
