package tcp

// Connections in TIME-WAIT that a restore brings back. The side that closed first keeps a connection's four numbers (two
// addresses, two ports) for a minute. A SYN of the same four numbers may open a new connection meanwhile, if its sequence
// number is higher than the last one; any other is dropped without an answer, so that connect() hangs. Initial sequence
// numbers (RFC 6528) are a hash of the four numbers and a secret, plus the time: they rise, and a SYN from a port that is
// used again is always higher.
//
// A restore breaks that. The secret is a new one, so half of such SYNs are lower. And the minute begins anew: in a sandbox
// that is never awake for as long, connections in TIME-WAIT become more and more, and with them the chance that a client
// hits upon the port of one. A server in the sandbox then looks dead to one client in a few hundred.
//
// What is restored runs over loopback: connections through an interface are terminated. There are no late segments of a
// connection that went through a save, which is what TIME-WAIT waits for.

// restoredTimeWait is how long a connection that is restored in TIME-WAIT remains so. What it received can still be read.
const restoredTimeWait = 0

// wasRestored tells whether a connection is from before the latest restore: then its sequence numbers say nothing about
// those of a SYN, and the SYN is a new connection's.
func (e *Endpoint) wasRestored() bool {
	// Not saved, and set when an endpoint is loaded.
	return e.origEndpointState != 0
}
