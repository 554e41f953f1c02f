// Package faults kills what the library runs on and checks what is left.
//
// TestKilledAtEveryStep kills a server process at each step of a request.
// TestChaos kills nodes and databases at random, with bad networks between
// them, and checks the history that clients saw against the promises.
package faults
