package systrap

// The fast path of systrap: sentry and stub wait for each other by spinning rather than asleep. It makes a loop of system
// calls up to forty times faster, and takes the processors away from short programs, which are mostly page faults and new
// address spaces: on a machine with two, a shell that starts takes half as long again. gVisor turns it on within a
// millisecond of activity and judges it by the latency of single switches, which spinning always improves.
//
// The judge goes by what got done: how often there was a switch per period, with it and without.
//
//	            25 periods           14 periods                     64 to 1024 periods
//	idle ──> off, counting ──> on (gVisor's own states), counting ──> the better one ──┐
//	  ^            ^                                                                   │
//	  │            └── off, counting, 14 periods <─────────────────────────────────────┘
//	  └── whenever nothing happened for a period
//
// What must hold: an idle sandbox sleeps, as with gVisor's own states.
const (
	// Periods are gVisor's: 400 microseconds. So many pass before the first try; few programs that are run for their
	// output are as long at work.
	firstOff = 25
	// So many are counted of either kind after that.
	counted = 12
	// What happens right after a change is not counted.
	unsettled = 2
	// How long the better one is kept: longer while it stays the better one.
	shortestHold = 64
	longestHold  = 1024
	// It takes more than noise to spin.
	worthwhile = 1.1
	// In a period with fewer switches than this nobody waits for them.
	fewest = 2
	// A backoff that does not end.
	never = 1 << 30
)

type phase int

const (
	countingOff phase = iota
	countingOn
	holding
)

// Only the goroutine that is controlFastPath touches it.
type judge struct {
	phase phase
	// Periods of this phase, gone and in all.
	gone, length int
	switches     uint64
	// Switches that were seen before and not taken away since.
	carried uint64
	// Of the last try.
	perPeriodOff float64
	wasBetter    bool
	hold         int
}

func newJudge(s *fastPathState) *judge {
	j := &judge{}
	j.countOff(s, firstOff)
	return j
}

// period is called at the end of each.
func (j *judge) period(s *fastPathState) {
	switches := latencies.sentryBound.sum() - j.carried
	s.curState(s)
	j.carried = latencies.sentryBound.sum()

	if switches < fewest {
		return
	}
	j.gone++
	if j.gone > unsettled {
		j.switches += switches
	}
	if j.gone < j.length {
		return
	}
	perPeriod := float64(j.switches) / float64(j.length-unsettled)
	switch j.phase {
	case countingOff:
		j.perPeriodOff = perPeriod
		j.begin(countingOn, unsettled+counted)
		s.stubFPBackoff, s.sentryFPBackoff = 0, 0
		s.stubFPRecentFailures, s.sentryFPRecentFailures = 0, 0
	case countingOn:
		better := perPeriod > worthwhile*j.perPeriodOff
		if better == j.wasBetter {
			j.hold = min(longestHold, max(shortestHold, 2*j.hold))
		} else {
			j.hold = shortestHold
		}
		j.wasBetter = better
		if !better {
			turnOff(s)
		}
		j.begin(holding, j.hold)
	case holding:
		j.countOff(s, unsettled+counted)
	}
}

// park sleeps until something happens; whoever is busy then is judged anew.
func (j *judge) park(s *fastPathState) {
	j.countOff(s, firstOff)
	j.hold = 0
	s.park()
}

func (j *judge) begin(phase phase, length int) {
	j.phase, j.length, j.gone, j.switches = phase, length, 0, 0
}

func (j *judge) countOff(s *fastPathState, length int) {
	turnOff(s)
	j.begin(countingOff, length)
}

func turnOff(s *fastPathState) {
	s.sentryFastPathEnabled.Store(false)
	s.stubFastPathEnabled.Store(false)
	s.stubFPBackoff, s.sentryFPBackoff = never, never
	s.curState = sentryOffStubOff
}

func (b *latencyBuckets) sum() uint64 {
	var sum uint64
	for i := range b {
		sum += b[i].Load()
	}
	return sum
}
