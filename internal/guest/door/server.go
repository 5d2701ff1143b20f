package door

import (
	"context"
	"log"
	"net/http"
	"time"
)

type upstreamKey struct{}

func withUpstream(ctx context.Context, up Upstream) context.Context {
	return context.WithValue(ctx, upstreamKey{}, up)
}

func upstreamOf(ctx context.Context) Upstream {
	up, _ := ctx.Value(upstreamKey{}).(Upstream)
	return up
}

// Server returns an HTTP server for the door: slow or huge headers are cut
// off, streams may last as long as they like.
func (d *Door) Server(errorLog *log.Logger) *http.Server {
	protocols := new(http.Protocols)
	protocols.SetHTTP1(true)
	return &http.Server{
		Handler:           d,
		ReadHeaderTimeout: 10 * time.Second,
		IdleTimeout:       2 * time.Minute,
		MaxHeaderBytes:    64 << 10,
		Protocols:         protocols,
		ErrorLog:          errorLog,
	}
}
