package cli

import (
	"context"
	"errors"
	"os"

	"hermes-box-lite/internal/backup"
)

// passphraseSource is what the environment said of the passphrase when the
// program started.
type passphraseSource struct {
	text    backup.Passphrase
	textErr error
	given   bool   // BOX_PASSPHRASE was set, be it to nothing
	file    string // BOX_PASSPHRASE_FILE
}

// takePassphrase reads and unsets the variables: a passphrase is for this
// process alone, not for what it starts.
func takePassphrase() passphraseSource {
	var s passphraseSource
	text, given := os.LookupEnv("BOX_PASSPHRASE")
	if s.given = given; given {
		s.text, s.textErr = backup.NewPassphrase(text)
	}
	s.file = os.Getenv("BOX_PASSPHRASE_FILE")
	for _, name := range []string{"BOX_PASSPHRASE", "BOX_PASSPHRASE_FILE"} {
		_ = os.Unsetenv(name)
	}
	return s
}

// passphraseHint is how to give one without a terminal.
const passphraseHint = "set BOX_PASSPHRASE, or BOX_PASSPHRASE_FILE to a file whose first line it is"

// passphrase returns the one of the environment or asks for it; a new one is
// asked for twice.
func (a *app) passphrase(ctx context.Context, isNew bool) (backup.Passphrase, error) {
	switch {
	case a.secret.given && a.secret.textErr != nil:
		return backup.Passphrase{}, errors.New("BOX_PASSPHRASE: " + a.secret.textErr.Error())
	case a.secret.given:
		return a.secret.text, nil
	case a.secret.file != "":
		return backup.ReadPassphrase(a.secret.file)
	}
	show, err := a.term.hideTyping()
	if errors.Is(err, errNotAsked) {
		return backup.Passphrase{}, errors.New("there is no passphrase: " + passphraseHint)
	}
	if err != nil {
		return backup.Passphrase{}, err
	}
	defer show()
	first, err := a.term.ask(ctx, "Passphrase of the archive: ")
	if err != nil {
		return backup.Passphrase{}, err
	}
	p, err := backup.NewPassphrase(first)
	if err != nil || !isNew {
		return p, err
	}
	second, err := a.term.ask(ctx, "The same once more: ")
	if err != nil {
		return backup.Passphrase{}, err
	}
	if first != second {
		return backup.Passphrase{}, errors.New("the two passphrases differ, nothing was saved")
	}
	return p, nil
}
