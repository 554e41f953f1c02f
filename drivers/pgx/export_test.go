package pgxstore

// Waiting tells how many calls wait for a lane.
func (s *Store) Waiting() int {
	s.lanes.mu.Lock()
	defer s.lanes.mu.Unlock()
	return len(s.lanes.waiting)
}

// Table is the name of the table.
func (s *Store) Table() string { return s.table.full() }
