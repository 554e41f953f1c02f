package redisstore

import "github.com/redis/go-redis/v9"

// script is sent by its digest, and whole to a server that does not know it yet.
type script struct{ source, sha string }

func newScript(body string) *script {
	source := prelude + body
	return &script{source: source, sha: redis.NewScript(source).Hash()}
}

// The fields of a row's hash. They are the stored format, so they stay.
//
//	f  fingerprint
//	s  status, see dedup.Status
//	t  token, 16 bytes; gone once an operator has resolved the row
//	a  attempt
//	l  end of the lease; only while in progress
//	c  created at
//	e  expires at
//	w  somebody waits for the run to end; only then is the end published
//	r  response code
//	h  response header
//	b  response body
//
// Times are microseconds since 1970 by the server's clock. They are written with
// %.0f, since Lua's own way rounds them.

// prelude is at the head of each script. A row's physical expiry follows its
// end, but scripts go by the fields alone.
const prelude = `
local key = KEYS[1]
local t = redis.call('TIME')
local now = t[1] * 1000000 + t[2]
local function int(n) return string.format('%.0f', n) end
local function expired(s, l, e)
	if s == '3' then return false end
	return math.max(tonumber(e), s == '1' and tonumber(l) or 0) <= now
end
local function expire(s, l, e)
	if s == '3' then
		redis.call('PERSIST', key)
	else
		redis.call('PEXPIREAT', key, int(math.ceil(math.max(e, s == '1' and l or 0) / 1000)))
	end
end
local function ended(w)
	if w then redis.call('PUBLISH', ARGV[1], key) end
end
`

var (
	// KEYS: row. ARGV: fingerprint, token, lease, ttl (microseconds).
	// Returns state, and what it comes with.
	claimScript = newScript(`
local s, f, tok, a, l, e = unpack(redis.call('HMGET', key, 's', 'f', 't', 'a', 'l', 'e'))
if s and not expired(s, l, e) then
	if f ~= ARGV[1] then return {'mismatch', f} end
	if s == '2' then return {'completed', unpack(redis.call('HMGET', key, 'r', 'h', 'b'))} end
	if s == '3' then return {'unknown'} end
	if tok ~= ARGV[2] then
		local left = tonumber(l) - now
		if left > 0 then return {'in progress', int(left)} end
		a = tonumber(a) + 1
	end
else
	if s then redis.call('DEL', key) end
	a = 1
	redis.call('HSET', key, 'f', ARGV[1], 's', '1', 'c', int(now))
end
l, e = now + ARGV[3], now + ARGV[4]
redis.call('HSET', key, 't', ARGV[2], 'a', a, 'l', int(l), 'e', int(e))
expire('1', l, e)
return {'held', tonumber(a)}`)

	// KEYS: row. ARGV: token, lease. Returns 1, or 0 if the token is not current.
	renewScript = newScript(`
local s, tok, l, e = unpack(redis.call('HMGET', key, 's', 't', 'l', 'e'))
if s ~= '1' or tok ~= ARGV[1] or expired(s, l, e) then return 0 end
l = now + ARGV[2]
redis.call('HSET', key, 'l', int(l))
expire(s, l, tonumber(e))
return 1`)

	// KEYS: row. ARGV: channel, token, status, code, header, body, ttl.
	completeScript = newScript(`
local s, tok, l, e, w = unpack(redis.call('HMGET', key, 's', 't', 'l', 'e', 'w'))
if not s or tok ~= ARGV[2] or expired(s, l, e) then return 0 end
if s == '1' then
	s = ARGV[3]
	redis.call('HSET', key, 's', s, 'r', ARGV[4], 'h', ARGV[5], 'b', ARGV[6])
	redis.call('HDEL', key, 'l', 'w')
	ended(w)
end
e = now + ARGV[7]
redis.call('HSET', key, 'e', int(e))
expire(s, 0, e)
return 1`)

	// KEYS: row. ARGV: channel, token.
	releaseScript = newScript(`
local s, tok, l, e, w = unpack(redis.call('HMGET', key, 's', 't', 'l', 'e', 'w'))
if s ~= '1' or tok ~= ARGV[2] or expired(s, l, e) then return 0 end
redis.call('DEL', key)
ended(w)
return 1`)

	// KEYS: row. Returns nil, or now and the fields.
	getScript = newScript(`
local row = redis.call('HMGET', key, 's', 'l', 'e', 'f', 't', 'a', 'c', 'r', 'h', 'b')
if not row[1] or expired(row[1], row[2], row[3]) then return false end
table.insert(row, 1, int(now))
return row`)

	// KEYS: row. ARGV: channel, '1' with a response, code, header, body, ttl.
	resolveScript = newScript(`
local s, l, e, w = unpack(redis.call('HMGET', key, 's', 'l', 'e', 'w'))
if not s or expired(s, l, e) then return 'absent' end
if s == '2' or (s == '1' and tonumber(l) > now) then return 'refused' end
if ARGV[2] == '1' then
	e = now + ARGV[6]
	redis.call('HSET', key, 's', '2', 'r', ARGV[3], 'h', ARGV[4], 'b', ARGV[5], 'e', int(e))
	redis.call('HDEL', key, 'l', 't', 'w')
	expire('2', 0, e)
else
	redis.call('DEL', key)
end
ended(w)
return 'done'`)

	// KEYS: row. Returns 1 if a run is there whose end will be published.
	watchScript = newScript(`
local s, l, e = unpack(redis.call('HMGET', key, 's', 'l', 'e'))
if s ~= '1' or expired(s, l, e) then return 0 end
redis.call('HSET', key, 'w', '1')
return 1`)
)
