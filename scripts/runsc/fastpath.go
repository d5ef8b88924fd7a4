package main

import (
	"reflect"
	_ "unsafe" // for go:linkname

	"gvisor.dev/gvisor/pkg/atomicbitops"
	"gvisor.dev/gvisor/pkg/hostarch"
	_ "gvisor.dev/gvisor/pkg/sentry/platform/systrap" // holds what is linked to
)

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
// What must hold: an idle sandbox sleeps, as with gVisor's own states; what is not as it was in the version that this was
// written for is left alone.
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

// The layout is systrap's.
type buckets [80]atomicbitops.Uint64

type latencyRecorder struct {
	stubBound   buckets
	sentryBound buckets
}

type fastPathState struct {
	stubBoundBaseline   buckets
	sentryBoundBaseline buckets

	stubBackoff          int
	sentryBackoff        int
	stubFailures         int
	sentryFailures       int
	stubFailuresInARow   int
	sentryFailuresInARow int

	_              [hostarch.CacheLineSize]byte
	stubEnabled    atomicbitops.Bool
	_              [hostarch.CacheLineSize]byte
	sentryEnabled  atomicbitops.Bool
	_              [hostarch.CacheLineSize]byte
	awake          atomicbitops.Uint32
	_              [hostarch.CacheLineSize]byte
	usedStub       atomicbitops.Bool
	_              [hostarch.CacheLineSize]byte
	usedSentry     atomicbitops.Bool
	_              [hostarch.CacheLineSize]byte
	curState       func(*fastPathState)
	_              [hostarch.CacheLineSize]byte
	recentActivity atomicbitops.Bool
	_              [hostarch.CacheLineSize]byte
	monitorParked  atomicbitops.Bool
	monitorWakeup  chan struct{}
	_              [hostarch.CacheLineSize]byte
}

//go:linkname fastpath gvisor.dev/gvisor/pkg/sentry/platform/systrap.fastpath
var fastpath fastPathState

//go:linkname latencies gvisor.dev/gvisor/pkg/sentry/platform/systrap.latencies
var latencies latencyRecorder

//go:linkname sentryOffStubOff gvisor.dev/gvisor/pkg/sentry/platform/systrap.sentryOffStubOff
func sentryOffStubOff(*fastPathState)

type phase int

const (
	countingOff phase = iota
	countingOn
	holding
)

type judge struct {
	// What gVisor would do next.
	inner func(*fastPathState)
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

// judgeFastPath takes the place of gVisor's states, before the platform is there.
func judgeFastPath() {
	stock := reflect.ValueOf(sentryOffStubOff).Pointer()
	asKnown := reflect.ValueOf(fastpath.curState).Pointer() == stock &&
		fastpath.stubBackoff == 2 && fastpath.sentryBackoff == 2 && cap(fastpath.monitorWakeup) == 1
	if !asKnown {
		return
	}
	j := &judge{}
	j.countOff(&fastpath, firstOff)
	fastpath.curState = j.period
}

// period is called at the end of each.
func (j *judge) period(s *fastPathState) {
	switches := latencies.sentryBound.sum() - j.carried
	s.curState = j.inner
	j.inner(s)
	j.inner, s.curState = s.curState, j.period
	j.carried = latencies.sentryBound.sum()

	if !s.recentActivity.Load() {
		j.park(s)
		return
	}
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
		s.stubBackoff, s.sentryBackoff = 0, 0
		s.stubFailures, s.sentryFailures = 0, 0
	case countingOn:
		better := perPeriod > worthwhile*j.perPeriodOff
		if better == j.wasBetter {
			j.hold = min(longestHold, max(shortestHold, 2*j.hold))
		} else {
			j.hold = shortestHold
		}
		j.wasBetter = better
		if !better {
			j.turnOff(s)
		}
		j.begin(holding, j.hold)
	case holding:
		j.countOff(s, unsettled+counted)
	}
}

func (j *judge) begin(phase phase, length int) {
	j.phase, j.length, j.gone, j.switches = phase, length, 0, 0
}

func (j *judge) countOff(s *fastPathState, length int) {
	j.turnOff(s)
	j.begin(countingOff, length)
}

func (j *judge) turnOff(s *fastPathState) {
	s.sentryEnabled.Store(false)
	s.stubEnabled.Store(false)
	s.stubBackoff, s.sentryBackoff = never, never
	j.inner = sentryOffStubOff
}

// park sleeps until something happens, as gVisor's own does; that one would take our place away, so it must find that
// something has happened.
func (j *judge) park(s *fastPathState) {
	j.countOff(s, firstOff)
	j.hold = 0
	select {
	case <-s.monitorWakeup:
	default:
	}
	s.monitorParked.Store(true)
	// After this was said, whoever is active wakes us.
	if !s.recentActivity.Load() {
		<-s.monitorWakeup
	}
	s.monitorParked.Store(false)
	s.recentActivity.Store(true)
}

func (b *buckets) sum() uint64 {
	var sum uint64
	for i := range b {
		sum += b[i].Load()
	}
	return sum
}
