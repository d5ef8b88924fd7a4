package usertrap

// Systrap replaces a system call by a jump, which makes it up to five times faster from then on. The first time is dear: the
// page of code becomes the process's own, is copied, taken out of its address space and mapped again. gVisor does so at the
// first call from anywhere, and a short program makes most of its calls once or twice: a shell, Python or git that starts
// spends an eighth to a quarter of its time on it.
//
// So a place is replaced when it has been called a few times. Of 3, 4, 8, 12 and 32 all were better than 1, and hardly told
// apart.
const (
	hotAt = 8
	// So many places are counted at once; at one more, counting begins anew. The table of those replaced holds fewer.
	mostPlaces = 512
)

// calls counts how often a place that is not replaced was called, by the address after it. What must hold: it stays small
// whatever the guest calls, and a place that is called often is found whatever else was called before.
type calls map[uintptr]uint8

// again notes one more call, and tells whether the place is worth being replaced.
func (c *calls) again(place uintptr) bool {
	if *c == nil || len(*c) == mostPlaces {
		*c = make(calls)
	}
	(*c)[place]++
	if (*c)[place] < hotAt {
		return false
	}
	delete(*c, place)
	return true
}
