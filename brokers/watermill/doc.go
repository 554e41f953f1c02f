// Package watermillbroker connects Watermill with package consumer. It has two
// ways to handle each message once:
//
//   - [Middleware] wraps the handler, which may so take part in a transaction.
//     For handlers that publish nothing.
//   - [Subscriber] wraps any Watermill subscriber. A message counts as processed
//     when it is acknowledged, and a router does that once what the handler
//     returned is published.
package watermillbroker
